-- All hashes that an index names, in its order, in one look.
local found = {}
for _, id in ipairs(redis.call('ZRANGE', a.index, 0, -1)) do
  local row = hash(a.prefix .. id .. (a.suffix or ''))
  row.id = id
  found[#found + 1] = row
end
return cjson.encode({rows = found})
