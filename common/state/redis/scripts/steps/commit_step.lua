-- uses: groups phase
-- A step becomes the current version, once per (job, lineage, step): its groups end, the version
-- moves, and engines may see it. Trained rows move into the step's row, where a replay after a
-- crash finds them.
local step_id = a.lineage .. ':' .. a.step
local step_key = JOB .. ':step:' .. step_id
local manifest = redis.call('HGET', step_key, 'manifest')
if manifest == a.manifest then return cjson.encode({version = a.step, replayed = true}) end
if not holds(a.trainer, a.token) then return fenced(a.trainer) end
if manifest then
  return refuse('refused', 'step ' .. a.step .. ' of lineage ' .. a.lineage ..
    ' is committed with manifest ' .. manifest .. ', not ' .. a.manifest)
end
local job = hash(JOB .. ':job')
if tonumber(job.lineage) ~= a.lineage or tonumber(job.version) ~= a.step - 1 then
  return refuse('refused', 'step ' .. a.step .. ' of lineage ' .. a.lineage ..
    ' does not follow version ' .. tostring(job.version) .. ' of lineage ' .. tostring(job.lineage))
end

local filtered = {}
for _, group in ipairs(a.filtered) do filtered[group] = true end
local rows, taken, newest = {}, {}, -1
local trained, left_out, drops = 0, 0, 0
for n, group in ipairs(a.groups) do
  local row = hash(group_key(group))
  local token, step = tonumber(row.trainer_token), tonumber(row.step)
  if row.state ~= 'leased' or token ~= a.token or step ~= a.step then
    return refuse('refused', 'group ' .. group .. ' is not leased for step ' .. a.step .. ' by ' ..
      a.trainer)
  end
  local samples, scored = tonumber(row.samples), tonumber(row.scored)
  local out = filtered[group] or false
  row.group, row.state = group, (out and 'filtered@' or 'trained@') .. a.step
  rows[n] = row
  taken[n] = {group = group, samples = samples, scored = scored, filtered = out}
  if out then left_out = left_out + scored else trained = trained + scored end
  drops = drops + samples - scored
  newest = math.max(newest, group)
end
local leased = redis.call('ZCARD', index('leased'))
if leased ~= #rows then
  return refuse('refused', 'step ' .. a.step .. ' leased ' .. leased ..
    ' groups and accounts for ' .. #rows)
end

-- Nothing is refused from here on: what follows happens whole.
for _, row in ipairs(rows) do redis.call('DEL', group_key(row.group)) end
redis.call('DEL', index('leased'))
for _, group in ipairs(redis.call('ZRANGEBYSCORE', index('open'), '-inf', '(' .. newest)) do
  redis.call('HINCRBY', group_key(group), 'passed', 1)
end
count('trained', trained)
count('filtered', left_out)
count('typed_drops', drops)
redis.call('HSET', JOB .. ':job', 'version', a.step, 'steps_done', a.step, 'manifest', a.manifest,
  'checkpoint', a.checkpoint, 'image', a.image, 'masters', a.masters)
-- Trajectories that have ended since the commit before, in groups of this step and in those that
-- were dropped meanwhile. A job that was put back, or went back, begins to count at this step.
local total = redis.call('HMGET', JOB .. ':job', 'trained', 'filtered', 'typed_drops', 'told_ended',
  'told_failed')
local all_failed = tonumber(total[3])
local all_ended = tonumber(total[1]) + tonumber(total[2]) + all_failed
local first = a.step == 1
local here = trained + left_out + drops
local ended = all_ended - tonumber(total[4] or (first and 0 or all_ended - here))
local failed = all_failed - tonumber(total[5] or (first and 0 or all_failed - drops))
redis.call('HSET', JOB .. ':job', 'told_ended', all_ended, 'told_failed', all_failed)
redis.call('HSET', step_key, 'lineage', a.lineage, 'step', a.step, 'manifest', a.manifest,
  'image', a.image, 'masters', a.masters,
  'checkpoint', a.checkpoint, 'committed_ms', NOW, 'trained', trained, 'filtered', left_out,
  'ended', ended, 'failed', failed, 'groups', cjson.encode(rows), 'metrics', a.metrics,
  'record', a.record)
redis.call('ZADD', JOB .. ':steps', a.step, step_id)
progressed(JOB)
-- A checkpoint that covers a step has its groups in it: they are not replayed any more.
local covered = redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.covered, a.covered)
for _, id in ipairs(covered) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'covered', math.max(a.covered, tonumber(job.covered)))
event('step', {job = a.job, lineage = a.lineage, step = a.step, version = a.step,
  manifest = a.manifest, checkpoint = a.checkpoint, image = a.image, masters = a.masters,
  groups = taken}, a.metrics_field)
if a.step >= tonumber(job.budget_steps) and ORDER[job.phase] < ORDER.evaluation then
  enter_phase('evaluation', '')
end
return cjson.encode({version = a.step, replayed = false})
