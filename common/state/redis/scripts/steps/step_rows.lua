-- Answers the rows of the current lineage's steps after step `since`, in order.
local rows = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1] .. ':steps', '(' .. args.since, '+inf')) do
  rows[#rows + 1] = read_hash(KEYS[1] .. ':step:' .. id)
end
return cjson.encode({rows = rows})
