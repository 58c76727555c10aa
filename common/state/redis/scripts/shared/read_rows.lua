-- All hashes that an index names, in its order, in one look; with the fields of those beside them.
local found = {}
for _, id in ipairs(redis.call('ZRANGE', args.index, 0, -1)) do
  local row = read_hash(args.prefix .. id .. (args.suffix or ''))
  if args.extra_key then
    for field, value in pairs(read_hash(args.prefix .. id .. args.extra_key)) do
      row[field] = value
    end
  end
  row.id = id
  found[#found + 1] = row
end
return cjson.encode({rows = found})
