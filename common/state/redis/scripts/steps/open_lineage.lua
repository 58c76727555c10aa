-- uses: groups phase readers
-- Opens a new lineage at a checkpoint, because a replay did not reproduce the committed digests.
-- Abandons the later steps with their evaluations; their groups are ready again. `rollback`: the
-- checkpoint is older than the one that covers steps.
local previous = previous_reply()
if previous then return previous end
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local job = read_hash(JOB .. ':job')
local abandoned = redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. args.version, '+inf')
if args.version < tonumber(job.checkpointed_version) and not args.rollback
  or args.version > tonumber(job.version) then
  return reject('refused', 'no lineage can open at version ' .. args.version .. ': steps up to ' ..
    job.checkpointed_version .. ' are covered by a checkpoint, and the current version is ' ..
    job.version)
end
for _, group in ipairs(redis.call('ZRANGE', index_key('leased'), 0, -1)) do
  move_group(group, 'leased', 'ready')
end
local returned = {}
for _, id in ipairs(abandoned) do
  local rows = redis.call('HGET', JOB .. ':step:' .. id, 'groups')
  for _, row in ipairs(rows and cjson.decode(rows) or {}) do
    local samples, scored = tonumber(row.samples), tonumber(row.scored)
    add_count(string.sub(row.state, 1, 7) == 'trained' and 'trained' or 'filtered', -scored)
    add_count('typed_drops', scored - samples)
    local group = row.group
    returned[#returned + 1] = group
    row.group, row.state = nil, 'ready'
    for field, value in pairs(row) do redis.call('HSET', group_key(group), field, value) end
    redis.call('ZADD', index_key('ready'), group, group)
  end
  redis.call('DEL', JOB .. ':step:' .. id)
end
-- The new lineage uses the abandoned version numbers again, for other weights. `abandoned_above`
-- marks a group's earlier tokens of these versions. A group's own version is limited too: engines
-- below it may not serve the group, which must not wait for an abandoned version.
for _, state in ipairs({'open', 'ready'}) do
  for _, group in ipairs(redis.call('ZRANGE', index_key(state), 0, -1)) do
    local row = redis.call('HMGET', group_key(group), 'abandoned_above', 'version')
    redis.call('HSET', group_key(group),
      'abandoned_above', math.min(tonumber(row[1] or args.version), args.version),
      'version', math.min(tonumber(row[2]), args.version))
  end
end
local lost = 0
-- Rows of covered steps do not name their groups. All that ended since the checkpoint therefore
-- counts as lost. Prompts that were opened since, and are not in work, return to the cursor.
if args.rollback then
  for field, count in pairs(args.rollback.counts) do
    lost = lost + tonumber(redis.call('HGET', JOB .. ':job', field)) - count
    redis.call('HSET', JOB .. ':job', field, count)
  end
  add_count('host_lost', lost)
  local due, group_count = {}, 0 -- due: prompt -> number of groups still to open
  local function add_due(prompt, n) due[prompt] = (due[prompt] or 0) + n end
  for _, prompt in ipairs(args.rollback.requeue) do add_due(prompt, 1) end
  for prompt = args.rollback.cursor, tonumber(job.cursor) - 1 do add_due(prompt, 1) end
  for _, entry in ipairs(redis.call('LRANGE', JOB .. ':requeue', 0, -1)) do
    add_due(tonumber(string.match(entry, '^%d+')), -1)
  end
  for _, state in ipairs({'open', 'ready'}) do
    for _, group in ipairs(redis.call('ZRANGE', index_key(state), 0, -1)) do
      add_due(tonumber(redis.call('HGET', group_key(group), 'prompt')), -1)
      group_count = group_count + 1
    end
  end
  local prompts = {}
  for prompt in pairs(due) do prompts[#prompts + 1] = prompt end
  table.sort(prompts)
  for _, prompt in ipairs(prompts) do
    for _ = 1, due[prompt] do redis.call('RPUSH', JOB .. ':requeue', prompt .. ':0') end
  end
  redis.call('HSET', JOB .. ':job', 'checkpointed_version', args.version,
    'admitted', args.version * tonumber(job.groups_per_step) + group_count)
end
for tag, row in pairs(read_hash(JOB .. ':evaluations')) do
  if cjson.decode(row).step > args.version then redis.call('HDEL', JOB .. ':evaluations', tag) end
end
redis.call('HDEL', JOB .. ':job', 'counted_ended', 'counted_failed')
if tonumber(job.early_stop or -1) > args.version then -- its evaluation is repeated
  job.budget_steps = job.full_budget
  redis.call('HSET', JOB .. ':job', 'budget_steps', job.full_budget)
  redis.call('HDEL', JOB .. ':job', 'early_stop', 'full_budget')
end
if tonumber(job.best_version or -1) > args.version then
  redis.call('HDEL', JOB .. ':job', 'best_version', 'best_manifest', 'best_value')
end
redis.call('ZREMRANGEBYSCORE', JOB .. ':steps', '(' .. args.version, '+inf')
reset_recorded_steps(args.job, args.version)
local lineage = tonumber(job.lineage) + 1
redis.call('HSET', JOB .. ':job', 'lineage', lineage, 'version', args.version,
  'steps_done', args.version, 'manifest', args.manifest, 'checkpoint', args.checkpoint,
  'image', args.image, 'masters', args.masters)
local fields = {job = args.job, lineage = lineage, from_lineage = tonumber(job.lineage),
  version = args.version, manifest = args.manifest, checkpoint = args.checkpoint,
  image = args.image, masters = args.masters, abandoned_steps = #abandoned,
  returned_groups = #returned}
if args.rollback then -- groups of steps up to `lost_through` do not return
  fields.host_lost, fields.counts, fields.lost_through = lost, args.rollback.counts,
    tonumber(job.checkpointed_version)
end
append_event('lineage', fields)
if job.phase == 'evaluation' and args.version < tonumber(job.budget_steps) then
  set_phase('training', '')
end
return reply({lineage = lineage})
