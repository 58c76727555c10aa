-- uses: phase
-- A person ends a job, whoever works on it: they see that its phase has changed. What it has made
-- stays, and `reopen` takes it up again. One that has ended keeps the end that it had.
local seen = previous_reply()
if seen then return seen end
local phase = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not phase then return reject('not_found', 'there is no job ' .. args.job) end
local ends = PHASE_ORDER[phase] == PHASE_ORDER.stopped
if not ends then set_phase('stopped', '') end
return reply({cancelled = not ends, phase = phase})
