-- Rows of the steps of the lineage that stands, after a step, in order.
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1] .. ':steps', '(' .. args.since, '+inf')) do
  found[#found + 1] = read_hash(KEYS[1] .. ':step:' .. id)
end
return cjson.encode({rows = found})
