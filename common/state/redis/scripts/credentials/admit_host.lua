-- uses: credentials
-- Admits a host: its keys are accepted from now on. `first`: only if no host is admitted yet.
-- `alone`: all other hosts are removed. Answers whether the host is new.
if args.first and #redis.call('SMEMBERS', ADMITTED) > 0 then return cjson.encode({new = false}) end
if args.alone then
  for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
    if host ~= args.host then
      redis.call('SREM', ADMITTED, host)
      for _, role in ipairs(args.roles) do redis.call('DEL', keys_of_role(role, host)) end
      redis.call('INCR', REVOCATIONS)
    end
  end
end
return cjson.encode({new = redis.call('SADD', ADMITTED, args.host) == 1})
