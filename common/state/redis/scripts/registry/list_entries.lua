-- uses: snapshot_stats
-- The registry, with the dead of the last ten minutes.
remove_dead_entries()
local index = MESH .. ':entries'
local found = {}
for _, name in ipairs(args.names or redis.call('ZRANGE', index, 0, -1)) do
  local row = read_hash(MESH .. ':entry:' .. name)
  if row.token then
    row.name, row.alive = name, is_live(row.expires_ms, row.renewed_ms)
    found[#found + 1] = row
  end
end
return cjson.encode({entries = found})
