-- Stores the launcher's answer to a request for `kept_ms`, while the gateway may request it again.
redis.call('HDEL', MESH .. ':host_requests', args.id)
redis.call('SET', MESH .. ':host_answers:' .. args.id, args.answer, 'PX', args.kept_ms)
return cjson.encode({answered = true})
