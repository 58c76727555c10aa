-- uses: outage
-- Raises the mesh epoch once per outage: only who still sees the epoch from before it does.
local epoch = tonumber(redis.call('GET', MESH .. ':epoch') or 0)
if epoch == a.seen then epoch = raise_epoch(a.away_ms) end
return cjson.encode({epoch = epoch})
