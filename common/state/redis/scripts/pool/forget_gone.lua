-- uses: pool counted
-- Rows of workers that nobody waits for any more, and of hosts without an agent, are removed once
-- their processes have been gone for long. A worker that comes back all the same joins again. So
-- are the last ends of residents that are on record no more: no other ever has their names.
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
forget_dead()

local function gone(name)
  local lease = redis.call('HMGET', MESH .. ':entry:' .. name, 'expires_ms', 'renewed_ms')
  return not lease[1] or not lasts(lease[1], lease[2]) and tonumber(lease[1]) < NOW - a.gone_ms
end

local removed = 0
for _, worker in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
  if removed == a.most then break end
  if redis.call('HGET', WORKER .. worker, 'gang') == '' and gone(worker_process(worker)) then
    redis.call('DEL', WORKER .. worker)
    redis.call('ZREM', WORKERS, worker)
    show_worker(worker)
    removed = removed + 1
    event('gone', {worker = worker})
  end
end
for _, host in ipairs(redis.call('ZRANGE', HOSTS, 0, -1)) do
  if gone('node/' .. host) then
    redis.call('DEL', SERVICES .. host)
    redis.call('ZREM', HOSTS, host)
  end
end
for host in pairs(hash(DRAINING)) do
  if gone('node/' .. host) then redis.call('HDEL', DRAINING, host) end
end
local ENDED, dropped = MESH .. ':ended', 0
for name, text in pairs(hash(ENDED)) do
  if dropped == a.most then break end
  local gang, resident = string.match(name, '^%a+/(g%d+)(%.%d+)$')
  local kind = string.match(name, '^%a+')
  if gang and (kind == 'engine' or kind == 'hybrid')
    and redis.call('HEXISTS', GANG .. gang, 'resident:' .. gang .. resident) == 0
    and tonumber(cjson.decode(text).at_ms) < NOW - a.ended_ms then
    redis.call('HDEL', ENDED, name)
    dropped = dropped + 1
  end
end
return cjson.encode({removed = removed})
