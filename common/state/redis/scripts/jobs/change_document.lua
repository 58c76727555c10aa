-- uses: phase readers
-- A person changes the document of a job that no process works on, and lets it go on: one that has
-- ended, or is about to, trains again if there are more steps to do than it has done. What was
-- evaluated after training was then evaluated on the way.
local seen = previous_reply()
if seen then return seen end
local job = KEYS[1] .. ':job'
local row = read_hash(job)
if not row.phase then return reject('not_found', 'there is no job ' .. args.job) end
local version = tonumber(row.version)
redis.call('HSET', KEYS[1] .. ':submission', 'document', args.document)
redis.call('HSET', job, 'digest', args.digest, 'budget_steps', args.budget_steps,
  'max_staleness', args.max_staleness)
local over = PHASE_ORDER[row.phase] >= PHASE_ORDER.evaluation
  and version >= tonumber(row.budget_steps)
local extended = over and version < args.budget_steps
local told = append_event('changed', {job = args.job, lineage = tonumber(row.lineage),
  version = version,
  extended = extended}, args.extra)
if PHASE_ORDER[row.phase] == 5 then retain_for_recorder(args.job, told) end
local phase = nil
if extended then
  phase = 'training'
  if version == 0 then phase = 'baseline' end
  local evaluations = KEYS[1] .. ':evaluations'
  local after = redis.call('HGET', evaluations, 'after')
  if after then
    local kept = cjson.decode(after)
    kept.tag = 'step-' .. kept.step
    redis.call('HSETNX', evaluations, kept.tag, cjson.encode(kept))
    redis.call('HDEL', evaluations, 'after')
  end
elseif row.phase == 'training' and version >= args.budget_steps then
  phase = 'evaluation'
end
if phase then set_phase(phase, '') end
return reply({extended = extended})
