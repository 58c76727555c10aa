-- uses: phase readers
-- Resumes a stopped or failed job at the phase that its version implies. A finished job stays
-- finished.
local previous = previous_reply()
if previous then return previous end
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
