-- What a look of the planners' leader reads of processes: one hash, by name, of JSON texts.
local STATS_SNAPSHOT = MESH .. ':snapshot:stats'

-- `text` is what the process tells of itself, if it is of a kind that counts.
local function update_stats_snapshot(name, incarnation, text)
  if not text then return end
  redis.call('HSET', STATS_SNAPSHOT, name,
    '{"incarnation":"' .. incarnation .. '",' .. string.sub(text, 2))
end

-- The dead are remembered for ten minutes: a culprit must be nameable after its lease has ended.
local DEAD_RETENTION_MS = 600000

local function remove_dead_entries()
  local index = MESH .. ':entries'
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', NOW - DEAD_RETENTION_MS)) do
    redis.call('DEL', MESH .. ':entry:' .. name)
    redis.call('ZREM', index, name)
    redis.call('HDEL', STATS_SNAPSHOT, name)
  end
end
