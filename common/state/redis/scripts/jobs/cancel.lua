-- uses: phase
-- Stops a job for a user; its processes see the new phase. Its results stay, and `reopen` resumes
-- it. Answers whether this call stopped it: a job that has ended retains its phase.
local previous = previous_reply()
if previous then return previous end
local phase = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not phase then return reject('not_found', 'there is no job ' .. args.job) end
local has_ended = PHASE_ORDER[phase] == PHASE_ORDER.stopped
if not has_ended then set_phase('stopped', '') end
return reply({cancelled = not has_ended, phase = phase})
