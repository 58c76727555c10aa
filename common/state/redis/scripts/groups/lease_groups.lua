-- uses: groups
-- Leases the oldest ready groups to a trainer for one step, as many as are ready. The same trainer
-- and step get the same groups again, and more, until the step is complete. Groups in `known` are
-- not sent again, because a waiting trainer polls many times a second.
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local job = redis.call('HMGET', JOB .. ':job', 'version', 'max_staleness', 'groups_per_step',
  'leased_for')
local version, staleness, step_size = tonumber(job[1]), tonumber(job[2]), tonumber(job[3])
if version ~= args.step - 1 then
  return reject('refused', 'step ' .. args.step .. ' requires version ' .. (args.step - 1) ..
    ', and the current version is ' .. version)
end

-- Groups leased to an earlier start of the trainer, or for another step, are ready again.
local lease = args.token .. ':' .. args.step
if job[4] ~= lease then
  for _, group in ipairs(redis.call('ZRANGE', index_key('leased'), 0, -1)) do
    move_group(group, 'leased', 'ready')
  end
  redis.call('HSET', JOB .. ':job', 'leased_for', lease)
end

local chosen = redis.call('ZRANGE', index_key('leased'), 0, -1)

-- A slow group may be passed over, so that one long trajectory does not stall training. After
-- `max_staleness` times its slot in the step is reserved. Otherwise training would favour short
-- trajectories for long.
local reserved, awaited = 0, nil
for _, group in ipairs(redis.call('ZRANGE', index_key('open'), 0, -1)) do
  if #chosen + reserved == step_size then break end
  if tonumber(redis.call('HGET', group_key(group), 'passed')) >= staleness then
    reserved = reserved + 1
    awaited = awaited or group
  end
end

local stale = {}
for _, group in ipairs(redis.call('ZRANGE', index_key('ready'), 0, -1)) do
  if #chosen + reserved == step_size then break end
  local row = redis.call('HMGET', group_key(group), 'min_version', 'prompt', 'samples', 'passed',
    'abandoned_above')
  local sampled, abandoned = tonumber(row[1]), tonumber(row[5] or row[1])
  local oldest = math.min(sampled, abandoned)
  -- Tokens of an abandoned lineage are at least one version old: no step has their weights.
  if math.max(version - oldest, sampled > abandoned and 1 or 0) > staleness then
    return_group(group, {state = 'ready', prompt = row[2], passed = row[4]}, true)
    add_count('stale_requeued', tonumber(row[3]))
    stale[#stale + 1] = {group = tonumber(group), prompt = tonumber(row[2]),
      samples = tonumber(row[3]), min_version = oldest}
  else
    move_group(group, 'ready', 'leased')
    redis.call('HSET', group_key(group), 'trainer', args.trainer, 'trainer_token', args.token,
      'step', args.step)
    chosen[#chosen + 1] = group
  end
end
if #stale > 0 then append_event('stale', {job = args.job, version = version, groups = stale}) end

table.sort(chosen, function(a, b) return tonumber(a) < tonumber(b) end)
local known, rows = {}, {}
for _, group in ipairs(args.known) do known[group] = true end
for _, group in ipairs(chosen) do
  if not known[tonumber(group)] then
    local row = read_hash(group_key(group))
    row.group = tonumber(group)
    rows[#rows + 1] = row
  end
end
if #chosen == step_size then return cjson.encode({groups = rows}) end

local oldest = awaited or redis.call('ZRANGE', index_key('open'), 0, 0)[1]
local reason, shard = #chosen .. ' of ' .. step_size .. ' groups are ready', ''
if oldest then
  shard = redis.call('HGET', group_key(oldest), 'shard')
  reason = reason .. ', group ' .. oldest .. ' of ' .. shard
  reason = reason .. (awaited and ' is waited for' or ' is the oldest that is open')
end
return cjson.encode({groups = rows, waiting = reason, shard = shard})
