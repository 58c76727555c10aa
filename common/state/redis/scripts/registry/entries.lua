-- uses: counted
-- The registry, with the dead of the last ten minutes.
forget_dead()
local index = MESH .. ':entries'
local found = {}
for _, name in ipairs(a.names or redis.call('ZRANGE', index, 0, -1)) do
  local row = hash(MESH .. ':entry:' .. name)
  if row.token then
    row.name, row.alive = name, lasts(row.expires_ms, row.renewed_ms)
    found[#found + 1] = row
  end
end
return cjson.encode({entries = found})
