-- uses: doors
-- Keys that come in no more: all of a host, or one. The number tells every process, with the next
-- renewal of its lease, to forget what it knew.
local n = 0
if a.host then
  n = redis.call('SREM', ADMITTED, a.host)
  for _, role in ipairs(a.roles) do redis.call('DEL', door(role, a.host)) end
else
  n = redis.call('SADD', REVOKED, a.public)
  for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
    for _, role in ipairs(a.roles) do
      local own = door(role, host)
      if redis.call('HDEL', own, a.public) == 1 then
        for _, bulk in ipairs(bulk_keys(own, a.public)) do
          redis.call('HDEL', own, bulk)
        end
      end
    end
  end
end
redis.call('INCR', DOORS)
if n == 1 then event('revoked', {host = a.host, key = a.public}) end
return cjson.encode({revoked = n == 1})
