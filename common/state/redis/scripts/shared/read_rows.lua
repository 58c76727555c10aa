-- Answers all hashes that the index names, in its order, as one consistent snapshot. With
-- `extra_key` each row also has the fields of a second hash.
local rows = {}
for _, id in ipairs(redis.call('ZRANGE', args.index, 0, -1)) do
  local row = read_hash(args.prefix .. id .. (args.suffix or ''))
  if args.extra_key then
    for field, value in pairs(read_hash(args.prefix .. id .. args.extra_key)) do
      row[field] = value
    end
  end
  row.id = id
  rows[#rows + 1] = row
end
return cjson.encode({rows = rows})
