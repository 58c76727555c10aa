-- Stores the mesh's settings for the planner. Answers the start time of the mesh, which is now.
redis.call('SET', MESH .. ':settings', '{"pool":' .. args.pool .. ',"up_since_ms":' ..
  string.format('%.0f', NOW) .. '}')
return cjson.encode({up_since_ms = NOW})
