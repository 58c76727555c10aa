-- uses: pool
-- A worker announces itself, or takes up its record again: it stays in its gang. A new start of it
-- has no role process: they die with their worker.
local name = worker_name(args.worker)
if not has_lease(name, args.token) then return reject_fenced(name) end
if string.find(args.worker, '[%s:"\\{}]') then
  return reject('refused', args.worker .. ' cannot be the name of a worker')
end
local key = WORKER .. args.worker
local held = redis.call('HGET', key, 'token')
if not held then
  redis.call('HSET', key, 'gang', '', 'membership', 0, 'revision', 0)
  redis.call('ZADD', WORKERS, NOW, args.worker)
end
redis.call('HSET', key, 'details', args.details, 'token', args.token)
if not held or tonumber(held) ~= args.token then
  delete_reports(args.worker)
  redis.call('HINCRBY', key, 'revision', 1)
  append_event('joined', {worker = args.worker, host = args.host, accelerator = args.accelerator})
end
update_worker_snapshot(args.worker)
return '{"row":' .. worker_json(args.worker) .. '}'
