-- uses: pool
-- Creates or renews a worker's record and answers its row; the worker stays in its gang. A
-- restarted worker (another token) has no role processes, because they exit with their worker.
local name = worker_name(args.worker)
if not has_lease(name, args.token) then return reject_fenced(name) end
if string.find(args.worker, '[%s:"\\{}]') then
  return reject('refused', args.worker .. ' cannot be the name of a worker')
end
local key = WORKER .. args.worker
local recorded_token = redis.call('HGET', key, 'token')
if not recorded_token then
  redis.call('HSET', key, 'gang', '', 'membership', 0, 'revision', 0)
  redis.call('ZADD', WORKERS, NOW, args.worker)
end
redis.call('HSET', key, 'details', args.details, 'token', args.token)
if not recorded_token or tonumber(recorded_token) ~= args.token then
  delete_reports(args.worker)
  redis.call('HINCRBY', key, 'revision', 1)
  append_event('joined', {worker = args.worker, host = args.host, accelerator = args.accelerator})
end
update_worker_snapshot(args.worker)
return '{"row":' .. worker_json(args.worker) .. '}'
