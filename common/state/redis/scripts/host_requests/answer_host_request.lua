-- The launcher's answer, which is kept for as long as its reader may ask again.
redis.call('HDEL', MESH .. ':host_requests', args.id)
redis.call('SET', MESH .. ':host_answers:' .. args.id, args.answer, 'PX', args.kept_ms)
return cjson.encode({answered = true})
