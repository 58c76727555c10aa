-- Stats of processes for the planner leader's snapshot: one hash of JSON texts by process name.
local STATS_SNAPSHOT = MESH .. ':snapshot:stats'

-- `text` is the JSON object of the process's stats; nil for kinds without snapshot stats.
local function update_stats_snapshot(name, incarnation, text)
  if not text then return end
  redis.call('HSET', STATS_SNAPSHOT, name,
    '{"incarnation":"' .. incarnation .. '",' .. string.sub(text, 2))
end

-- A culprit must be nameable after its lease has expired: dead entries stay for ten minutes.
local DEAD_RETENTION_MS = 600000

local function remove_dead_entries()
  local index = MESH .. ':entries'
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', NOW - DEAD_RETENTION_MS)) do
    redis.call('DEL', MESH .. ':entry:' .. name)
    redis.call('ZREM', index, name)
    redis.call('HDEL', STATS_SNAPSHOT, name)
  end
end
