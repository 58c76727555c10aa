-- Phases only go forward; the last three end a job.
local ORDER = {queued = 0, warm_start = 1, baseline = 2, training = 3, evaluation = 4,
  finished = 5, failed = 5, stopped = 5}

local function enter_phase(phase, error_text)
  local job = KEYS[1] .. ':job'
  redis.call('HSET', job, 'phase', phase, 'error', error_text, 'progress_ms', NOW)
  return event('phase', {job = a.job, phase = phase, error = error_text})
end
