-- After Redis was away for longer than a lease, all leases are over and nobody is to blame: those
-- that were live when it went are live again for the grace, so that no name changes hands because
-- of it.
local GRACE_MS = 10000

local function raise_epoch(away_ms)
  local epoch = redis.call('INCR', MESH .. ':epoch')
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', MESH .. ':entries', NOW - away_ms, NOW)) do
    local key = MESH .. ':entry:' .. name
    if redis.call('HGET', key, 'is_released') ~= '1' then
      redis.call('HSET', key, 'expires_ms', NOW + GRACE_MS)
      redis.call('ZADD', MESH .. ':entries', NOW + GRACE_MS, name)
    end
  end
  redis.call('SET', MESH .. ':outage_ms', NOW)
  append_event('epoch', {epoch = epoch, away_ms = away_ms})
  return epoch
end
