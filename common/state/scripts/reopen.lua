-- uses: phase
-- A person resumes a job that was stopped or has failed; one that used up its budget stays ended.
local seen = replayed()
if seen then return seen end
local row = hash(KEYS[1] .. ':job')
if not row.phase then return refuse('not_found', 'there is no job ' .. a.job) end
if row.phase == 'finished' then return refuse('refused', a.job .. ' has finished') end
if ORDER[row.phase] == 5 then
  local version = tonumber(row.version)
  local phase = 'queued'
  if version >= tonumber(row.budget_steps) then phase = 'evaluation' elseif version >= 0 then
    phase = 'baseline' end
  if version > 0 and phase == 'baseline' then phase = 'training' end
  enter_phase(phase, '')
end
return done({reopened = true})
