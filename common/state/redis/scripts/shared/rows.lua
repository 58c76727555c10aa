-- All hashes that an index names, in its order, in one look; with the fields of those beside them.
local found = {}
for _, id in ipairs(redis.call('ZRANGE', a.index, 0, -1)) do
  local row = hash(a.prefix .. id .. (a.suffix or ''))
  if a.beside then
    for field, value in pairs(hash(a.prefix .. id .. a.beside)) do row[field] = value end
  end
  row.id = id
  found[#found + 1] = row
end
return cjson.encode({rows = found})
