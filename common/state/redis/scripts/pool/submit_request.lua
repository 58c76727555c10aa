-- uses: pool
-- Records a user's request until a leader grants or rejects it. A host to be drained is marked at
-- once, so that nothing new is placed there.
local previous = previous_reply()
if previous then return previous end
redis.call('HSET', REQUESTS, args.op, cjson.encode({kind = args.kind, worker = args.worker,
  role = args.role, job = args.job, partner = args.partner, host = args.host,
  requested_ms = NOW}))
if args.kind == 'drain' then redis.call('HSET', DRAINING, args.host, 'asked for') end
append_event(args.kind .. '_requested', {op = args.op, worker = args.worker, role = args.role,
  job = args.job, partner = args.partner, host = args.host})
return reply({requested = true})
