-- uses: phase readers
-- A person resumes a job that was stopped or has failed; a finished one stays so.
local seen = replayed()
if seen then return seen end
local row = hash(KEYS[1] .. ':job')
if not row.phase then return refuse('not_found', 'there is no job ' .. a.job) end
if row.phase == 'finished' then return refuse('refused', a.job .. ' has finished') end
if ORDER[row.phase] == 5 then
  local version, phase = tonumber(row.version), 'queued'
  if version >= 0 then phase = 'baseline' end
  if version > 0 then phase = 'training' end
  if version >= tonumber(row.budget_steps) then phase = 'evaluation' end
  await_recorder(a.job, enter_phase(phase, ''))
end
return done({reopened = true})
