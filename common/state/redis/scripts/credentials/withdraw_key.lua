-- uses: credentials
-- A process takes its own keys away.
redis.call('HDEL', keys_of_role(args.role, args.host), args.public_key, args.bulk_public_key)
return cjson.encode({left = true})
