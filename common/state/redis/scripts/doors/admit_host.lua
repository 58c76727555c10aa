-- uses: doors
-- Keys of this host come in from now on. `first`: only while no host's do. `alone`: no other
-- host's do.
if a.first and #redis.call('SMEMBERS', ADMITTED) > 0 then return cjson.encode({new = false}) end
if a.alone then
  for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
    if host ~= a.host then
      redis.call('SREM', ADMITTED, host)
      for _, role in ipairs(a.roles) do redis.call('DEL', door(role, host)) end
      redis.call('INCR', DOORS)
    end
  end
end
return cjson.encode({new = redis.call('SADD', ADMITTED, a.host) == 1})
