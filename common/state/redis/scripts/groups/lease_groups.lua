-- uses: groups
-- The oldest ready groups for one step, as many as there are: the same ones again for the same
-- trainer and step, and more, until the step has all that it takes. What the trainer was `known`
-- already is not sent again: it asks many times a second while it waits.
if not has_lease(args.trainer, args.token) then return reject_fenced(args.trainer) end
local job = redis.call('HMGET', JOB .. ':job', 'version', 'max_staleness', 'groups_per_step',
  'leased_for')
local version, staleness, wanted = tonumber(job[1]), tonumber(job[2]), tonumber(job[3])
if version ~= args.step - 1 then
  return reject('refused', 'step ' .. args.step .. ' turns version ' .. (args.step - 1)
    .. ' into ' ..
    args.step .. ', and the current version is ' .. version)
end

-- What an earlier start of the trainer had leased, or for another step, is ready again.
local lease = args.token .. ':' .. args.step
if job[4] ~= lease then
  for _, group in ipairs(redis.call('ZRANGE', index_key('leased'), 0, -1)) do
    move_group(group, 'leased', 'ready')
  end
  redis.call('HSET', JOB .. ':job', 'leased_for', lease)
end

local chosen = redis.call('ZRANGE', index_key('leased'), 0, -1)

-- A slow group may be passed over, so that the tail stalls nobody, but only so often, so that short
-- ones are not favoured for long: then its place in the step is kept for it.
local kept, awaited = 0, nil
for _, group in ipairs(redis.call('ZRANGE', index_key('open'), 0, -1)) do
  if #chosen + kept == wanted then break end
  if tonumber(redis.call('HGET', group_key(group), 'passed')) >= staleness then
    kept = kept + 1
    awaited = awaited or group
  end
end

local stale = {}
for _, group in ipairs(redis.call('ZRANGE', index_key('ready'), 0, -1)) do
  if #chosen + kept == wanted then break end
  local row = redis.call('HMGET', group_key(group), 'min_version', 'prompt', 'samples', 'passed',
    'abandoned_above')
  local oldest = math.min(tonumber(row[1]), tonumber(row[5] or row[1]))
  if version - oldest > staleness then
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

table.sort(chosen, function(x, y) return tonumber(x) < tonumber(y) end)
local known, rows = {}, {}
for _, group in ipairs(args.known) do known[group] = true end
for _, group in ipairs(chosen) do
  if not known[tonumber(group)] then
    local row = read_hash(group_key(group))
    row.group = tonumber(group)
    rows[#rows + 1] = row
  end
end
if #chosen == wanted then return cjson.encode({groups = rows}) end

local oldest = awaited or redis.call('ZRANGE', index_key('open'), 0, 0)[1]
local reason, shard = #chosen .. ' of ' .. wanted .. ' groups are ready', ''
if oldest then
  shard = redis.call('HGET', group_key(oldest), 'shard')
  reason = reason .. ', group ' .. oldest .. ' of ' .. shard
  reason = reason .. (awaited and ' is waited for' or ' is the oldest that is open')
end
return cjson.encode({groups = rows, waiting = reason, shard = shard})
