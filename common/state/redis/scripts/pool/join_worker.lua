-- uses: pool
-- A worker announces itself, or takes up its record again: it stays in its gang. A new start of it
-- has no role process: they die with their worker.
local name = worker_process(a.worker)
if not holds(name, a.token) then return fenced(name) end
if string.find(a.worker, '[%s:"\\{}]') then
  return refuse('refused', a.worker .. ' cannot be the name of a worker')
end
local key = WORKER .. a.worker
local held = redis.call('HGET', key, 'token')
if not held then
  redis.call('HSET', key, 'gang', '', 'membership', 0, 'revision', 0)
  redis.call('ZADD', WORKERS, NOW, a.worker)
end
redis.call('HSET', key, 'about', a.about, 'token', a.token)
if not held or tonumber(held) ~= a.token then
  void_reports(a.worker)
  redis.call('HINCRBY', key, 'revision', 1)
  event('joined', {worker = a.worker, host = a.host, accelerator = a.accelerator})
end
show_worker(a.worker)
return '{"row":' .. worker_text(a.worker) .. '}'
