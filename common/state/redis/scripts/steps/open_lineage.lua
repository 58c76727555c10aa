-- uses: groups phase readers
-- A replay that did not give the committed digests: the steps after the checkpoint are abandoned,
-- their groups are ready once more, and numbering goes on from the checkpoint in a new lineage.
-- Versions above the checkpoint's are numbered again, so whatever a group has of those was sampled
-- by other weights than the ones that will have these numbers: `foreign_above` says so from now on.
-- What was evaluated of them, or was the best of them, is of no version any more.
-- `back`: the checkpoint is older than the one that covers steps. Of covered steps nothing tells
-- which groups they trained, so all that has ended since the checkpoint, by its account, is lost,
-- and each prompt that was given out since and is not on its way now goes back to the cursor.
local seen = replayed()
if seen then return seen end
if not holds(a.trainer, a.token) then return fenced(a.trainer) end
local job = hash(JOB .. ':job')
local abandoned = redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. a.version, '+inf')
if a.version < tonumber(job.covered) and not a.back or a.version > tonumber(job.version) then
  return refuse('refused', 'no lineage can open at version ' .. a.version .. ': steps up to ' ..
    job.covered .. ' are covered by a checkpoint, and the current version is ' .. job.version)
end
for _, group in ipairs(redis.call('ZRANGE', index('leased'), 0, -1)) do
  move(group, 'leased', 'ready')
end
local returned = {}
for _, id in ipairs(abandoned) do
  local rows = redis.call('HGET', JOB .. ':step:' .. id, 'groups')
  for _, row in ipairs(rows and cjson.decode(rows) or {}) do
    local samples, scored = tonumber(row.samples), tonumber(row.scored)
    count(string.sub(row.state, 1, 7) == 'trained' and 'trained' or 'filtered', -scored)
    count('typed_drops', scored - samples)
    local group = row.group
    returned[#returned + 1] = group
    row.group, row.state = nil, 'ready'
    for field, value in pairs(row) do redis.call('HSET', group_key(group), field, value) end
    redis.call('ZADD', index('ready'), group, group)
  end
  redis.call('DEL', JOB .. ':step:' .. id)
end
for _, state in ipairs({'open', 'ready'}) do
  for _, group in ipairs(redis.call('ZRANGE', index(state), 0, -1)) do
    local row = redis.call('HMGET', group_key(group), 'foreign_above', 'version')
    -- Engines below its version may not serve a group: it must not wait for one that is abandoned.
    redis.call('HSET', group_key(group),
      'foreign_above', math.min(tonumber(row[1] or a.version), a.version),
      'version', math.min(tonumber(row[2]), a.version))
  end
end
local lost = 0
if a.back then
  for field, was in pairs(a.back.counts) do
    lost = lost + tonumber(redis.call('HGET', JOB .. ':job', field)) - was
    redis.call('HSET', JOB .. ':job', field, was)
  end
  count('host_lost', lost)
  local due, groups = {}, 0 -- due: how often a prompt is still to come, by prompt
  local function owed(prompt, n) due[prompt] = (due[prompt] or 0) + n end
  for _, prompt in ipairs(a.back.requeue) do owed(prompt, 1) end
  for prompt = a.back.cursor, tonumber(job.cursor) - 1 do owed(prompt, 1) end
  for _, entry in ipairs(redis.call('LRANGE', JOB .. ':requeue', 0, -1)) do
    owed(tonumber(string.match(entry, '^%d+')), -1)
  end
  for _, state in ipairs({'open', 'ready'}) do
    for _, group in ipairs(redis.call('ZRANGE', index(state), 0, -1)) do
      owed(tonumber(redis.call('HGET', group_key(group), 'prompt')), -1)
      groups = groups + 1
    end
  end
  local prompts = {}
  for prompt in pairs(due) do prompts[#prompts + 1] = prompt end
  table.sort(prompts)
  for _, prompt in ipairs(prompts) do
    for _ = 1, due[prompt] do redis.call('RPUSH', JOB .. ':requeue', prompt .. ':0') end
  end
  redis.call('HSET', JOB .. ':job', 'covered', a.version,
    'admitted', a.version * tonumber(job.groups_per_step) + groups)
end
for tag, row in pairs(hash(JOB .. ':evaluations')) do
  if cjson.decode(row).step > a.version then redis.call('HDEL', JOB .. ':evaluations', tag) end
end
redis.call('HDEL', JOB .. ':job', 'told_ended', 'told_failed')
if tonumber(job.best_version or -1) > a.version then
  redis.call('HDEL', JOB .. ':job', 'best_version', 'best_manifest', 'best_value')
end
redis.call('ZREMRANGEBYSCORE', JOB .. ':steps', '(' .. a.version, '+inf')
unrecord(a.job, a.version)
local lineage = tonumber(job.lineage) + 1
redis.call('HSET', JOB .. ':job', 'lineage', lineage, 'version', a.version,
  'steps_done', a.version, 'manifest', a.manifest, 'checkpoint', a.checkpoint,
  'image', a.image, 'masters', a.masters)
local told = {job = a.job, lineage = lineage, from_lineage = tonumber(job.lineage),
  version = a.version, manifest = a.manifest, checkpoint = a.checkpoint,
  image = a.image, masters = a.masters, abandoned_steps = #abandoned, returned_groups = #returned}
if a.back then -- the groups of steps up to `lost_through` are none that come back
  told.host_lost, told.counts, told.lost_through = lost, a.back.counts, tonumber(job.covered)
end
event('lineage', told)
if job.phase == 'evaluation' and a.version < tonumber(job.budget_steps) then
  enter_phase('training', '')
end
return done({lineage = lineage})
