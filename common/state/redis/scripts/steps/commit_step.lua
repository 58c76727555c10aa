-- uses: groups phase
-- A step becomes the current version, once per (job, lineage, step): its groups end, the version
-- moves, and engines may see it. Trained rows move into the step's row, where a replay after a
-- crash finds them.
local step_id = args.lineage .. ':' .. args.step
local step_key = JOB .. ':step:' .. step_id
local manifest = redis.call('HGET', step_key, 'manifest')
if manifest == args.manifest then return cjson.encode({version = args.step, is_replay = true}) end
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
if manifest then
  return reject('refused', 'step ' .. args.step .. ' of lineage ' .. args.lineage ..
    ' is committed with manifest ' .. manifest .. ', not ' .. args.manifest)
end
local job = read_hash(JOB .. ':job')
if tonumber(job.lineage) ~= args.lineage or tonumber(job.version) ~= args.step - 1 then
  return reject('refused', 'step ' .. args.step .. ' of lineage ' .. args.lineage ..
    ' does not follow version ' .. tostring(job.version) .. ' of lineage ' .. tostring(job.lineage))
end

local filtered = {}
for _, group in ipairs(args.filtered) do filtered[group] = true end
local rows, taken, newest = {}, {}, -1
local trained, left_out, drops = 0, 0, 0
for n, group in ipairs(args.groups) do
  local row = read_hash(group_key(group))
  local token, step = tonumber(row.trainer_token), tonumber(row.step)
  if row.state ~= 'leased' or token ~= args.token or step ~= args.step then
    return reject('refused', 'group ' .. group .. ' is not leased for step ' .. args.step
      .. ' by ' ..
      args.trainer)
  end
  local samples, scored = tonumber(row.samples), tonumber(row.scored)
  local out = filtered[group] or false
  row.group, row.state = group, (out and 'filtered@' or 'trained@') .. args.step
  rows[n] = row
  taken[n] = {group = group, samples = samples, scored = scored, filtered = out}
  if out then left_out = left_out + scored else trained = trained + scored end
  drops = drops + samples - scored
  newest = math.max(newest, group)
end
local leased = redis.call('ZCARD', index_key('leased'))
if leased ~= #rows then
  return reject('refused', 'step ' .. args.step .. ' leased ' .. leased ..
    ' groups and accounts for ' .. #rows)
end

-- Nothing is refused from here on: what follows happens whole.
for _, row in ipairs(rows) do redis.call('DEL', group_key(row.group)) end
redis.call('DEL', index_key('leased'))
for _, group in ipairs(redis.call('ZRANGEBYSCORE', index_key('open'), '-inf', '(' .. newest)) do
  redis.call('HINCRBY', group_key(group), 'passed', 1)
end
add_count('trained', trained)
add_count('filtered', left_out)
add_count('typed_drops', drops)
redis.call('HSET', JOB .. ':job', 'version', args.step, 'steps_done', args.step,
  'manifest', args.manifest,
  'checkpoint', args.checkpoint, 'image', args.image, 'masters', args.masters)
-- Trajectories that have ended since the commit before, in groups of this step and in those that
-- were dropped meanwhile. A job that was put back, or went back, begins to count at this step.
local total = redis.call('HMGET', JOB .. ':job', 'trained', 'filtered', 'typed_drops',
  'counted_ended',
  'counted_failed')
local all_failed = tonumber(total[3])
local all_ended = tonumber(total[1]) + tonumber(total[2]) + all_failed
local first = args.step == 1
local here = trained + left_out + drops
local ended = all_ended - tonumber(total[4] or (first and 0 or all_ended - here))
local failed = all_failed - tonumber(total[5] or (first and 0 or all_failed - drops))
redis.call('HSET', JOB .. ':job', 'counted_ended', all_ended, 'counted_failed', all_failed)
redis.call('HSET', step_key, 'lineage', args.lineage, 'step', args.step, 'manifest', args.manifest,
  'image', args.image, 'masters', args.masters,
  'checkpoint', args.checkpoint, 'committed_ms', NOW, 'trained', trained, 'filtered', left_out,
  'ended', ended, 'failed', failed, 'groups', cjson.encode(rows), 'metrics', args.metrics,
  'record', args.record)
redis.call('ZADD', JOB .. ':steps', args.step, step_id)
record_progress(JOB)
-- A checkpoint that covers a step has its groups in it: they are not replayed any more.
local covered = redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.checkpointed_version,
  args.checkpointed_version)
for _, id in ipairs(covered) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'checkpointed_version',
  math.max(args.checkpointed_version, tonumber(job.checkpointed_version)))
append_event('step', {job = args.job, lineage = args.lineage, step = args.step, version = args.step,
  manifest = args.manifest, checkpoint = args.checkpoint, image = args.image,
  masters = args.masters,
  groups = taken}, args.metrics_field)
if args.step >= tonumber(job.budget_steps) and PHASE_ORDER[job.phase] < PHASE_ORDER.evaluation then
  set_phase('evaluation', '')
end
return cjson.encode({version = args.step, is_replay = false})
