-- The launcher's answer, which is kept for as long as its reader may ask again.
redis.call('HDEL', MESH .. ':asked', a.id)
redis.call('SET', MESH .. ':answered:' .. a.id, a.answer, 'PX', a.kept_ms)
return cjson.encode({answered = true})
