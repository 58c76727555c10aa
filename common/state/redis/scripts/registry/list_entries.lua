-- uses: snapshot_stats
-- Answers the registry's entries, or those of `names`, with those that died in the last ten
-- minutes.
remove_dead_entries()
local index = MESH .. ':entries'
local entries = {}
for _, name in ipairs(args.names or redis.call('ZRANGE', index, 0, -1)) do
  local row = read_hash(MESH .. ':entry:' .. name)
  if row.token then
    row.name, row.alive = name, is_live(row.expires_ms, row.renewed_ms)
    entries[#entries + 1] = row
  end
end
return cjson.encode({entries = entries})
