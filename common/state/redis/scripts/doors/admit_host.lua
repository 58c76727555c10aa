-- uses: doors
-- Keys of this host come in from now on.
return cjson.encode({new = redis.call('SADD', ADMITTED, a.host) == 1})
