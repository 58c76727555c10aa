-- uses: groups
-- The oldest ready groups for one step, as many as there are: the same ones again for the same
-- trainer and step, and more, until the step has all that it takes.
if not holds(a.trainer, a.token) then return fenced(a.trainer) end
local job = hash(JOB .. ':job')
local version, staleness = tonumber(job.version), tonumber(job.max_staleness)
local wanted = tonumber(job.groups_per_step)
if version ~= a.step - 1 then
  return refuse('refused', 'step ' .. a.step .. ' turns version ' .. (a.step - 1) .. ' into ' ..
    a.step .. ', and the current version is ' .. version)
end

-- What an earlier start of the trainer had leased, or for another step, is ready again.
for _, group in ipairs(redis.call('ZRANGE', index('leased'), 0, -1)) do
  local lease = redis.call('HMGET', group_key(group), 'trainer_token', 'step')
  if tonumber(lease[1]) ~= a.token or tonumber(lease[2]) ~= a.step then
    move(group, 'leased', 'ready')
  end
end

local chosen = redis.call('ZRANGE', index('leased'), 0, -1)

-- A slow group may be passed over, so that the tail stalls nobody, but only so often, so that short
-- ones are not favoured for long: then its place in the step is kept for it.
local kept, awaited = 0, nil
for _, group in ipairs(redis.call('ZRANGE', index('open'), 0, -1)) do
  if #chosen + kept == wanted then break end
  if tonumber(redis.call('HGET', group_key(group), 'passed')) >= staleness then
    kept = kept + 1
    awaited = awaited or group
  end
end

local stale = {}
for _, group in ipairs(redis.call('ZRANGE', index('ready'), 0, -1)) do
  if #chosen + kept == wanted then break end
  local row = redis.call('HMGET', group_key(group), 'min_version', 'prompt', 'samples', 'passed')
  if version - tonumber(row[1]) > staleness then
    give_back(group, {state = 'ready', prompt = row[2], passed = row[4]}, true)
    count('stale_requeued', tonumber(row[3]))
    stale[#stale + 1] = {group = tonumber(group), prompt = tonumber(row[2]),
      samples = tonumber(row[3]), min_version = tonumber(row[1])}
  else
    move(group, 'ready', 'leased')
    redis.call('HSET', group_key(group), 'trainer', a.trainer, 'trainer_token', a.token,
      'step', a.step)
    chosen[#chosen + 1] = group
  end
end
if #stale > 0 then event('stale', {job = a.job, version = version, groups = stale}) end

table.sort(chosen, function(x, y) return tonumber(x) < tonumber(y) end)
local rows = {}
for n, group in ipairs(chosen) do
  rows[n] = hash(group_key(group))
  rows[n].group = tonumber(group)
end
if #chosen == wanted then return cjson.encode({groups = rows}) end

local oldest = awaited or redis.call('ZRANGE', index('open'), 0, 0)[1]
local reason, on = #chosen .. ' of ' .. wanted .. ' groups are ready', ''
if oldest then
  on = redis.call('HGET', group_key(oldest), 'shard')
  reason = reason .. ', group ' .. oldest .. ' of ' .. on
  reason = reason .. (awaited and ' is waited for' or ' is the oldest that is open')
end
return cjson.encode({groups = rows, waiting = reason, on = on})
