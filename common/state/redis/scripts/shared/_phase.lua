-- Phases of a job, in their order: a job only moves forward. The last three are terminal.
local PHASE_ORDER = {queued = 0, warm_start = 1, baseline = 2, training = 3, evaluation = 4,
  finished = 5, failed = 5, stopped = 5}

-- Writes a job's phase and moves the job between the indexes. Active jobs are indexed by submission
-- time, so that a snapshot reads no others. Ended jobs are indexed by the time of their end.
local function set_phase(phase, error_text, job)
  job = job or args.job
  local key = '{' .. job .. '}:job'
  redis.call('HSET', key, 'phase', phase, 'error', error_text, 'progress_ms', NOW)
  if PHASE_ORDER[phase] == PHASE_ORDER.stopped then
    redis.call('HSET', key, 'block_reason', '', 'blocked_since_ms', NOW)
    redis.call('ZREM', MESH .. ':jobs:paused', job)
    redis.call('ZREM', MESH .. ':jobs:active', job)
    redis.call('ZADD', MESH .. ':jobs:ended', NOW, job)
  else
    redis.call('ZREM', MESH .. ':jobs:ended', job)
    local submitted = redis.call('ZSCORE', MESH .. ':jobs', job) or NOW
    redis.call('ZADD', MESH .. ':jobs:active', submitted, job)
  end
  return append_event('phase', {job = job, phase = phase, error = error_text})
end
