-- uses: doors
-- A process takes its own keys away.
redis.call('HDEL', door(a.role, a.host), a.public, a.bulk)
return cjson.encode({left = true})
