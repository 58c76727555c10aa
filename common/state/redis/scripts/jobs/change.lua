-- uses: phase readers
-- A person changes the document of a job that no process works on, and lets it go on: one that has
-- ended, or is about to, trains again if there are more steps to do than it has done. What was
-- evaluated after training was then evaluated on the way.
local seen = replayed()
if seen then return seen end
local job = KEYS[1] .. ':job'
local row = hash(job)
if not row.phase then return refuse('not_found', 'there is no job ' .. a.job) end
local version = tonumber(row.version)
redis.call('HSET', KEYS[1] .. ':given', 'document', a.document)
redis.call('HSET', job, 'digest', a.digest, 'budget_steps', a.budget_steps,
  'max_staleness', a.max_staleness)
local over = ORDER[row.phase] >= ORDER.evaluation and version >= tonumber(row.budget_steps)
local extended = over and version < a.budget_steps
local told = event('changed', {job = a.job, lineage = tonumber(row.lineage), version = version,
  extended = extended}, a.extra)
if ORDER[row.phase] == 5 then await_recorder(a.job, told) end
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
elseif row.phase == 'training' and version >= a.budget_steps then
  phase = 'evaluation'
end
if phase then enter_phase(phase, '') end
return done({extended = extended})
