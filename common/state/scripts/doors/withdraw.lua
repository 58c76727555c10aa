-- uses: doors
-- A process takes its own key away.
redis.call('HDEL', door(a.role, a.host), a.public)
return cjson.encode({left = true})
