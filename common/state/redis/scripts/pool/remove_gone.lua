-- uses: pool snapshot_stats
-- Removes rows of workers without a gang and of hosts without an agent, once their processes have
-- been gone for `gone_ms`. A worker that returns joins again. Also removes the last exits of
-- removed instances, whose names are never used again.
if not is_leader(args.election, args.token) then
  return reject_fenced('the leader of ' .. args.election)
end
remove_dead_entries()

local function is_gone(name)
  local lease = redis.call('HMGET', MESH .. ':entry:' .. name, 'expires_ms', 'renewed_ms')
  return not lease[1] or not is_live(lease[1], lease[2]) and tonumber(lease[1]) < NOW - args.gone_ms
end

local removed_workers = 0
for _, worker in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
  if removed_workers == args.most then break end
  if redis.call('HGET', WORKER .. worker, 'gang') == '' and is_gone(worker_name(worker)) then
    redis.call('DEL', WORKER .. worker)
    redis.call('ZREM', WORKERS, worker)
    update_worker_snapshot(worker)
    removed_workers = removed_workers + 1
    append_event('gone', {worker = worker})
  end
end
for _, host in ipairs(redis.call('ZRANGE', HOSTS, 0, -1)) do
  if is_gone('node/' .. host) then
    redis.call('DEL', SERVICES .. host)
    redis.call('ZREM', HOSTS, host)
  end
end
for host in pairs(read_hash(DRAINING)) do
  if is_gone('node/' .. host) then
    redis.call('HDEL', DRAINING, host)
    redis.call('HDEL', NOTICES, host)
  end
end
local EXITS, removed_exits = MESH .. ':exits', 0
for name, text in pairs(read_hash(EXITS)) do
  if removed_exits == args.most then break end
  local gang, number = string.match(name, '^%a+/(g%d+)(%.%d+)$')
  local kind = string.match(name, '^%a+')
  if gang and (kind == 'engine' or kind == 'hybrid')
    and redis.call('HEXISTS', GANG .. gang, 'instance:' .. gang .. number) == 0
    and tonumber(cjson.decode(text).at_ms) < NOW - args.ended_ms then
    redis.call('HDEL', EXITS, name)
    removed_exits = removed_exits + 1
  end
end
return cjson.encode({removed = removed_workers})
