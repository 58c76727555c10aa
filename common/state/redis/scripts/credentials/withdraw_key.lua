-- uses: credentials
-- Removes the caller's own keys.
redis.call('HDEL', keys_of_role(args.role, args.host), args.public_key, args.bulk_public_key)
return cjson.encode({left = true})
