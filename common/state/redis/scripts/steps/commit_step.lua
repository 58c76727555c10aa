-- uses: groups phase
-- Commits a step as the current version, once per (job, lineage, step). Its groups end, and engines
-- may fetch the version. Trained group rows move into the step's row, for a replay after a crash.
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
local rows, event_groups, newest = {}, {}, -1
local trained_count, filtered_count, dropped_count = 0, 0, 0
for n, group in ipairs(args.groups) do
  local row = read_hash(group_key(group))
  local token, step = tonumber(row.trainer_token), tonumber(row.step)
  if row.state ~= 'leased' or token ~= args.token or step ~= args.step then
    return reject('refused', 'group ' .. group .. ' is not leased for step ' .. args.step ..
      ' by ' .. args.trainer)
  end
  local samples, scored = tonumber(row.samples), tonumber(row.scored)
  local is_filtered = filtered[group] or false
  row.group, row.state = group, (is_filtered and 'filtered@' or 'trained@') .. args.step
  rows[n] = row
  event_groups[n] = {group = group, samples = samples, scored = scored, filtered = is_filtered}
  if is_filtered then
    filtered_count = filtered_count + scored
  else
    trained_count = trained_count + scored
  end
  dropped_count = dropped_count + samples - scored
  newest = math.max(newest, group)
end
local leased = redis.call('ZCARD', index_key('leased'))
if leased ~= #rows then
  return reject('refused', 'step ' .. args.step .. ' leased ' .. leased ..
    ' groups and accounts for ' .. #rows)
end

-- All rejections are above: the writes below happen all or not at all.
for _, row in ipairs(rows) do redis.call('DEL', group_key(row.group)) end
redis.call('DEL', index_key('leased'))
for _, group in ipairs(redis.call('ZRANGEBYSCORE', index_key('open'), '-inf', '(' .. newest)) do
  redis.call('HINCRBY', group_key(group), 'passed', 1)
end
add_count('trained', trained_count)
add_count('filtered', filtered_count)
add_count('typed_drops', dropped_count)
redis.call('HSET', JOB .. ':job', 'version', args.step, 'steps_done', args.step,
  'manifest', args.manifest, 'checkpoint', args.checkpoint, 'image', args.image,
  'masters', args.masters)
-- Counts trajectories that ended since the previous commit: in this step's groups and in groups
-- dropped meanwhile. A restored or rolled-back job starts the count at this step.
local totals = redis.call('HMGET', JOB .. ':job', 'trained', 'filtered', 'typed_drops',
  'counted_ended', 'counted_failed')
local all_failed = tonumber(totals[3])
local all_ended = tonumber(totals[1]) + tonumber(totals[2]) + all_failed
local is_first = args.step == 1
local step_count = trained_count + filtered_count + dropped_count
local ended_count = all_ended - tonumber(totals[4] or (is_first and 0 or all_ended - step_count))
local failed_count = all_failed
  - tonumber(totals[5] or (is_first and 0 or all_failed - dropped_count))
redis.call('HSET', JOB .. ':job', 'counted_ended', all_ended, 'counted_failed', all_failed)
redis.call('HSET', step_key, 'lineage', args.lineage, 'step', args.step, 'manifest', args.manifest,
  'image', args.image, 'masters', args.masters, 'checkpoint', args.checkpoint,
  'committed_ms', NOW, 'trained', trained_count, 'filtered', filtered_count,
  'ended', ended_count, 'failed', failed_count, 'groups', cjson.encode(rows),
  'metrics', args.metrics, 'record', args.record)
redis.call('ZADD', JOB .. ':steps', args.step, step_id)
record_progress(JOB)
-- A checkpoint covers these steps: their groups are never replayed again.
local covered = redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.checkpointed_version,
  args.checkpointed_version)
for _, id in ipairs(covered) do
  redis.call('HDEL', JOB .. ':step:' .. id, 'groups', 'record')
end
redis.call('HSET', JOB .. ':job', 'checkpointed_version',
  math.max(args.checkpointed_version, tonumber(job.checkpointed_version)))
append_event('step', {job = args.job, lineage = args.lineage, step = args.step, version = args.step,
  manifest = args.manifest, checkpoint = args.checkpoint, image = args.image,
  masters = args.masters, groups = event_groups}, args.metrics_field)
if args.step >= tonumber(job.budget_steps) and PHASE_ORDER[job.phase] < PHASE_ORDER.evaluation then
  set_phase('evaluation', '')
end
return cjson.encode({version = args.step, is_replay = false})
