-- uses: gang
-- A worker announces itself. A new start of it has no role process: role processes die with their
-- worker. Workers of a gang of another size are of an earlier mesh: one of them that still lives
-- joins again.
if not holds(a.worker, a.token) then return fenced(a.worker) end
local key = MESH .. ':gang:' .. a.gang
if redis.call('EXISTS', key) == 0 then
  redis.call('HSET', key, 'desired_role', 'idle', 'desired_job', '', 'desired_core', '0',
    'epoch', 0, 'pinned', '0', 'joined_ms', NOW)
  redis.call('ZADD', MESH .. ':gangs', NOW, a.gang)
end
local row = hash(key)
if row.size and tonumber(row.size) ~= a.size then
  for worker in pairs(workers_of(row)) do
    for _, field in ipairs({'worker:', 'state:', 'epoch:', 'detail:'}) do
      redis.call('HDEL', key, field .. worker)
    end
  end
end
local held = redis.call('HGET', key, 'worker:' .. a.worker)
if not held or tonumber(held) ~= a.token then
  redis.call('HSET', key, 'worker:' .. a.worker, a.token, 'state:' .. a.worker, 'idle',
    'epoch:' .. a.worker, 0, 'size', a.size, 'accelerator', a.accelerator, 'actual_role', 'idle',
    'actual_state', 'idle', 'actual_epoch', 0, 'detail', '', 'changed_ms', NOW)
  event('joined', {gang = a.gang, worker = a.worker, accelerator = a.accelerator})
end
row = hash(key)
row.id = a.gang
return cjson.encode({row = row})
