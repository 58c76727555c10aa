-- uses: phase
-- A person ends a job, whoever works on it: they see that its phase has changed. What it has made
-- stays, and `reopen` takes it up again. One that has ended keeps the end that it had.
local seen = replayed()
if seen then return seen end
local phase = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not phase then return refuse('not_found', 'there is no job ' .. a.job) end
local ends = ORDER[phase] == ORDER.stopped
if not ends then enter_phase('stopped', '') end
return done({cancelled = not ends, phase = phase})
