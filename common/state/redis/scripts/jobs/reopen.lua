-- uses: phase readers
-- A person resumes a job that was stopped or has failed; a finished one stays so.
local seen = previous_reply()
if seen then return seen end
local row = read_hash(KEYS[1] .. ':job')
if not row.phase then return reject('not_found', 'there is no job ' .. args.job) end
if row.phase == 'finished' then return reject('refused', args.job .. ' has finished') end
if PHASE_ORDER[row.phase] == 5 then
  local version, phase = tonumber(row.version), 'queued'
  if version >= 0 then phase = 'baseline' end
  if version > 0 then phase = 'training' end
  if version >= tonumber(row.budget_steps) then phase = 'evaluation' end
  retain_for_recorder(args.job, set_phase(phase, ''))
end
return reply({reopened = true})
