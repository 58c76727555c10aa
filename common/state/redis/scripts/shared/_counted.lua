-- What a look of the planners' leader reads of processes: one hash, by name, of JSON texts.
local COUNTED = MESH .. ':look:counted'

-- `text` is what the process tells of itself, if it is of a kind that counts.
local function show_counted(name, incarnation, text)
  if not text then return end
  redis.call('HSET', COUNTED, name,
    '{"incarnation":"' .. incarnation .. '",' .. string.sub(text, 2))
end

-- The dead are remembered for ten minutes: a culprit must be nameable after its lease has ended.
local REMEMBERED_MS = 600000

local function forget_dead()
  local index = MESH .. ':entries'
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', NOW - REMEMBERED_MS)) do
    redis.call('DEL', MESH .. ':entry:' .. name)
    redis.call('ZREM', index, name)
    redis.call('HDEL', COUNTED, name)
  end
end
