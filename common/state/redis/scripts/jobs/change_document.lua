-- uses: phase readers
-- Replaces the document of a job that no process works on. An ended job trains again if its step
-- budget now exceeds its version. The evaluation after training then becomes that of its step. An
-- early stop is undone if `undoes_early_stop`; evaluations so far then use up no patience.
local previous = previous_reply()
if previous then return previous end
local job = KEYS[1] .. ':job'
local row = read_hash(job)
if not row.phase then return reject('not_found', 'there is no job ' .. args.job) end
local version = tonumber(row.version)
redis.call('HSET', KEYS[1] .. ':submission', 'document', args.document)
local budget_steps = args.budget_steps
if row.early_stop and args.undoes_early_stop then
  redis.call('HDEL', job, 'early_stop', 'full_budget')
  redis.call('HSET', job, 'patience_since', version)
elseif row.early_stop then
  redis.call('HSET', job, 'full_budget', budget_steps)
  budget_steps = math.min(budget_steps, tonumber(row.budget_steps))
end
redis.call('HSET', job, 'digest', args.digest, 'budget_steps', budget_steps,
  'max_staleness', args.max_staleness)
local was_complete = PHASE_ORDER[row.phase] >= PHASE_ORDER.evaluation
  and version >= tonumber(row.budget_steps)
local extended = was_complete and version < budget_steps
local event_id = append_event('changed', {job = args.job, lineage = tonumber(row.lineage),
  version = version, extended = extended}, args.extra)
if PHASE_ORDER[row.phase] == 5 then retain_for_recorder(args.job, event_id) end
local phase = nil
if extended then
  phase = 'training'
  if version == 0 then phase = 'baseline' end
  local evaluations = KEYS[1] .. ':evaluations'
  local after = redis.call('HGET', evaluations, 'after')
  if after then
    local evaluation = cjson.decode(after)
    evaluation.tag = 'step-' .. evaluation.step
    redis.call('HSETNX', evaluations, evaluation.tag, cjson.encode(evaluation))
    redis.call('HDEL', evaluations, 'after')
  end
elseif row.phase == 'training' and version >= budget_steps then
  phase = 'evaluation'
end
if phase then set_phase(phase, '') end
return reply({extended = extended})
