-- uses: credentials
-- Keys that come in no more: all of a host, or one. The number tells every process, with the next
-- renewal of its lease, to forget what it knew.
local n = 0
if args.host then
  n = redis.call('SREM', ADMITTED, args.host)
  for _, role in ipairs(args.roles) do redis.call('DEL', keys_of_role(role, args.host)) end
else
  n = redis.call('SADD', REVOKED, args.public_key)
  for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
    for _, role in ipairs(args.roles) do
      local own = keys_of_role(role, host)
      if redis.call('HDEL', own, args.public_key) == 1 then
        for _, bulk in ipairs(bulk_keys(own, args.public_key)) do
          redis.call('HDEL', own, bulk)
        end
      end
    end
  end
end
redis.call('INCR', REVOCATIONS)
if n == 1 then append_event('revoked', {host = args.host, key = args.public_key}) end
return cjson.encode({revoked = n == 1})
