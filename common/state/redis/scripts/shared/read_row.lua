-- Answers the fields of the hash `key`, and those of the hash `extra_key` if given.
local row = read_hash(args.key)
if args.extra_key then
  for field, value in pairs(read_hash(args.extra_key)) do row[field] = value end
end
return cjson.encode({row = row})
