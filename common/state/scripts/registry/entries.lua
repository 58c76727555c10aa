-- The registry, with the dead of the last ten minutes: a culprit must be nameable after its lease
-- has ended.
local REMEMBERED_MS = 600000
local index = MESH .. ':entries'
for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', NOW - REMEMBERED_MS)) do
  redis.call('DEL', MESH .. ':entry:' .. name)
  redis.call('ZREM', index, name)
end
local found = {}
for _, name in ipairs(a.names or redis.call('ZRANGE', index, 0, -1)) do
  local row = hash(MESH .. ':entry:' .. name)
  if row.token then
    row.name, row.alive = name, lasts(row.expires_ms, row.renewed_ms)
    found[#found + 1] = row
  end
end
return cjson.encode({entries = found})
