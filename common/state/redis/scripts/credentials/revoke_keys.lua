-- uses: credentials
-- Revokes all keys of a host, or one key. The count of revocations reaches each process with its
-- next lease renewal, and makes it clear its cache of keys.
local changed = 0
if args.host then
  changed = redis.call('SREM', ADMITTED, args.host)
  for _, role in ipairs(args.roles) do redis.call('DEL', keys_of_role(role, args.host)) end
else
  changed = redis.call('SADD', REVOKED, args.public_key)
  for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
    for _, role in ipairs(args.roles) do
      local role_keys = keys_of_role(role, host)
      if redis.call('HDEL', role_keys, args.public_key) == 1 then
        for _, bulk in ipairs(bulk_keys(role_keys, args.public_key)) do
          redis.call('HDEL', role_keys, bulk)
        end
      end
    end
  end
end
redis.call('INCR', REVOCATIONS)
if changed == 1 then append_event('revoked', {host = args.host, key = args.public_key}) end
return cjson.encode({revoked = changed == 1})
